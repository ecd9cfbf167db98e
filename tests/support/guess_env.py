"""A guessing game in Gymnasium's registry: observations and actions are text."""

from __future__ import annotations

from typing import Any

import gymnasium


class Guess(gymnasium.Env[str, str]):
    """Which word is it? The first letter is shown."""

    observation_space = gymnasium.spaces.Text(200)
    action_space = gymnasium.spaces.Text(20)
    words = ("river", "mill", "wheel", "stone")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Choose a word by the seed."""
        super().reset(seed=seed)
        self._word = self.words[int(self.np_random.integers(len(self.words)))]
        return f"It begins with {self._word[0]}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One guess costs a tenth."""
        right = action == self._word
        return ("right" if right else "wrong"), 1.0 if right else -0.1, right, False, {}


gymnasium.register("tests/Guess-v0", entry_point=Guess)
