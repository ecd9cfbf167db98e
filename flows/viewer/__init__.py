"""The pages of `millrace view`: reading by byte ranges, the server on loopback, the page's files, and the export of one file."""
