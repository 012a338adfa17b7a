"""Short exchanges about everyday topics, most of the draft's training text."""

import random

from bundled_prompts.example import NAMES, Example

_TOPICS = ("music", "gardening", "cooking", "old films", "trains", "chess", "the sea", "painting", "travel", "birds")
_PLACES = ("the park", "the library", "a small cafe", "the market", "the station", "the museum", "my kitchen")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MOODS = ("happy", "tired", "curious", "calm", "busy", "excited", "a little sad", "proud")


def make(rng: random.Random) -> Example:
    """Draw one exchange; it has no checker."""
    name, other = rng.sample(NAMES, 2)
    topic, place, day, mood = (rng.choice(words) for words in (_TOPICS, _PLACES, _DAYS, _MOODS))
    prompt, answer = rng.choice(
        (
            (
                f"Tell me something about {topic}, please.",
                f"Gladly. Many people enjoy {topic} because it lets them rest. {name} talks about it every {day}.",
            ),
            (
                f"Write a short note from {name} to {other} about {topic}.",
                f"Dear {other}, I thought of you on {day} at {place}. Let us talk about {topic} soon. Yours, {name}.",
            ),
            (
                f"How was your {day}?",
                f"It was a good day, thank you. I went to {place} and felt {mood}. Later I read about {topic}.",
            ),
            (
                f"{name} feels {mood} today. What would you say?",
                f"I would ask {name} what happened and listen. Perhaps a walk to {place} with {other} would help.",
            ),
            (
                f"Give me an idea for {day}.",
                f"You could meet {name} at {place}, or stay at home and learn something new about {topic}.",
            ),
            (
                f"Which do you prefer, {place} or a book about {topic}?",
                f"Both are fine, but a book about {topic} is hard to beat when it rains. {name} would choose {place}.",
            ),
        )
    )
    return Example("talk", prompt, answer, prompt)
