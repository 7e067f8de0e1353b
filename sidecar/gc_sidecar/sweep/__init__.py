"""`gc-sidecar sweep`: the same points of load under each GC policy, and what became of every single measurement.

`plan` says what is sent when, `driver` sends it, `session` puts the policies round it, `journal` keeps it,
`analysis` judges it, and `reporting` and `page` show it.
"""
