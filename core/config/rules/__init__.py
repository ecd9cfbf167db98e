"""Rules between fields. Each module has the rules whose remedy changes its section. Rules look at values only.

Files, functions and servers that a configuration names are checked by millrace.flows.preflight.
"""

from millrace.core.config.rules.all_rules import problems as problems
