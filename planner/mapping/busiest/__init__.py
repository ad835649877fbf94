"""The objective busiest: a short busiest up-link."""
