"""What pages show of a run: texts, tables and pictures, made of figures. Sends nothing."""
