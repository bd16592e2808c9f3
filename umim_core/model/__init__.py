"""The public model: prompts, options, chats, outputs, and how merged text is shown."""
