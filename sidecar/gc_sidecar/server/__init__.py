"""The sidecar's server: a FastAPI app that asks an engine's processes for a GC policy and proves it.

Where to look:
- asking: `routes` and `requests` read a request, `views` and `exposition` answer, `problems` has every error;
  `answers` and `openapi` say what can be asked and what comes back
- changing: `coordinator` admits one operation at a time, `changes` makes it, `carrier` brings its command to the
  processes, `proof` and `attempt` say what came of it, `operations` records it
- wanting and knowing: `desired` is the policy, `knowledge` what is wanted and known, `watch` keeps it up to date,
  `forecast` tells how long the next maintenance takes
- seeing: `sight` reads pages, `reports` checks what they say, `roster` makes the list of processes of it
- judging: `pauses` keeps every collection, `windows` and `verdicts` judge a stretch of time, `latency` is vLLM's;
  `safety` says whether it is safe to measure right now
- reaching: `engines` and `transports` (RPC, over `engine_http`), `run_dir` (the board and the secret), which
  `claim` keeps for one sidecar; an `obstacle` is what stands in the way
- running: `settings`, `app`, `listeners`, `security`, `secret`, `logs`, `timing`, `tally`, `tasks`
"""
