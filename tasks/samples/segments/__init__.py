"""Unfinished answers: their stored segments, and their continuation."""
