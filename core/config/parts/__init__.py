"""Building blocks of configuration sections. No module here knows a section."""
