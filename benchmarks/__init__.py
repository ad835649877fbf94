"""Speed and accuracy figures: scripts that measure, and write what they found."""
