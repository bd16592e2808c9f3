"""The forms of the merge module, one class each."""
