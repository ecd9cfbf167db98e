"""Trainers: each is a rank for the driver."""
