"""Episodes: environments, tools, memory, rewards and the turn loop. Needs no engine, no Ray and no torch."""
