"""Which rows are drawn as the policy gets better: levels of difficulty, pools of solved rows, stages. Pure."""
