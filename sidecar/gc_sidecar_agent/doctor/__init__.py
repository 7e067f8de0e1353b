"""What `gc-sidecar doctor` in the engine's container is made of; its flags and the order of its checks are in
`gc_sidecar_agent.commands.doctor`. The sidecar's half, in `gc_sidecar.commands.doctor`, uses `findings` and
`run_dir_checks` too.

`engine_process` and `interpreter` ask, `site` holds the answers, `*_checks` judge them, `findings` shows what came
of it.
"""
