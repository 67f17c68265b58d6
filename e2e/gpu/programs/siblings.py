"""Runs two processes of one container that allocate all they can at the same time, and prints their sum."""

import json
import subprocess
import sys

programs = [
    subprocess.Popen([sys.argv[1], "greedy", "linear"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for _ in range(2)
]
# Each process holds its memory until both were refused.
answers = [json.loads(program.stdout.readline()) for program in programs]
for program in programs:
    program.communicate()
print(
    json.dumps(
        {
            "sees_mib": answers[0]["sees_mib"],
            "got_mib": sum(answer["got_mib"] for answer in answers),
            "each_mib": [answer["got_mib"] for answer in answers],
            "ran_on": all(answer["ran_on"] for answer in answers),
        }
    )
)
