"""A server that speaks Tinker's wire protocol over a training group and engines, and OpenAI's over the engines alone."""
