"""What `millrace chat` is made of: an engine in this process, one dialogue with it, and how answers are shown."""
