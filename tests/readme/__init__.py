"""What the README shows, run: the demo, and the ladder of its plot."""
