"""A CPU engine that speaks SGLang's native protocol: `python -m millrace.connectors.engines.embedded --model-path DIR --port P`."""
