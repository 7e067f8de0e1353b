"""`gc-sidecar sweep`: the same points of load under each GC policy, and what became of every single measurement.

`plan` says what is sent when, `driver` sends it and `events` reads the answers, `session` puts the policies round
it, `journal` keeps it, `analysis` judges it, `reporting` and `page` show it; `files` writes it.
"""
