"""Decides what runs where, and owns every request from submission to its end."""
