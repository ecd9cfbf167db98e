"""Files of prompts: which ones a source's path names, and the rows of each format."""
