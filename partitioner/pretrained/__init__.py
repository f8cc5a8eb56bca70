"""Models from the configuration files of Hugging Face transformers."""
