"""What an episode acts on: environments by name, made of tools or of users' own classes."""
