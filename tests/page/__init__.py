"""The page in a real Chromium, against sidecars that run."""
