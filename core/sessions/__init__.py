"""One rollout as its author sees it: a session that generates, observes, calls tools and branches."""
