"""Attention on several devices."""
