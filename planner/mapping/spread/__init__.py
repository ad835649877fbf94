"""The objective spread: groups that reach few pods and leaves."""
