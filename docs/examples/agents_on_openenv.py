"""Scripted agents on an OpenEnv server: python agents_on_openenv.py ws://localhost:8000 '{"message": "hello"}'"""

import asyncio
import json
import sys
import time

from envmanager import AsyncioEnvManager, LostEpisode

N_ENVS = 500
N_EPISODES = 2_000
LONGEST = 20
"""Number of steps after which an agent leaves its episode."""


async def agent(pool, task, action):
    """Play one episode, again if it is lost. Return its return, its length and the number of tries that were lost."""
    n_lost = 0
    while True:
        try:
            async with pool.begin(task) as episode:
                total, length = 0.0, 0
                while not episode.is_over and length < LONGEST:
                    _, reward, *_ = await episode.step(action)
                    total, length = total + reward, length + 1
                return total, length, n_lost
        except LostEpisode as lost:
            print(lost)
            n_lost += 1


async def main(pool, action):
    began = time.monotonic()
    played = await asyncio.gather(*(agent(pool, {"seed": seed}, action) for seed in range(N_EPISODES)))
    totals, lengths, lost = zip(*played, strict=True)
    rate = sum(lengths) / (time.monotonic() - began)
    print(f"{N_EPISODES} episodes, mean return {sum(totals) / N_EPISODES:.1f}, {rate:.0f} steps/s, {sum(lost)} lost")


if __name__ == "__main__":
    with AsyncioEnvManager({"openenv": sys.argv[1]}, N_ENVS) as manager:
        asyncio.run(main(manager.pool(), json.loads(sys.argv[2])))
