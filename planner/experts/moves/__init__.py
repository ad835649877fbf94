"""From a placement in use to a better one by few moves."""
