"""What fields demand of each other. Each module has the rules whose remedy changes its section; they need only values.

What a configuration names (files, functions, servers) is looked at by millrace.flows.preflight.
"""

from millrace.core.config.rules.all_rules import problems as problems
