"""Answers kept by merged prompts: a list of chats and of questions on documents."""
