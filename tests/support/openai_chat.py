"""Two turns of a chat with OpenAI's own client, in an environment that has it.

python openai_chat.py URL < REQUEST.json > ANSWER.json

The request holds ``messages``, the next question ``then`` and ``tokens``; its answer text and usage
of both streamed replies.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI


def main() -> None:
    request = json.load(sys.stdin)
    client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    messages, turns = request["messages"], []
    for question in (None, request["then"]):
        if question is not None:
            messages.append({"role": "assistant", "content": turns[-1]["text"]})
            messages.append({"role": "user", "content": question})
        text, usage = "", None
        for part in client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=request["tokens"],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            text += "".join(choice.delta.content or "" for choice in part.choices)
            usage = part.usage or usage
        turns.append({"text": text, "usage": usage.model_dump()})
    print(json.dumps(turns))


if __name__ == "__main__":
    main()
