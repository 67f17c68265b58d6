"""Ends a process by SIGKILL repeatedly, starts the next one, and prints the output of each.

usage: killed.py PROGRAM BYTES TIMES
"""

import subprocess
import sys
import time

program, size, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
since = time.monotonic_ns()
for left in range(times, -1, -1):
    image = subprocess.Popen([program, "image", "-", size, str(since)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    print(image.stdout.readline(), end="", flush=True)
    if left:
        image.stdin.write("kill\n")
        image.stdin.flush()
        since = time.monotonic_ns()
    image.stdin.close()
    image.wait()
