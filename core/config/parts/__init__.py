"""What configuration sections are made of. No module here knows a section."""
