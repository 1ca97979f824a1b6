"""Small models of other people's libraries."""

from architectures import images, others, texts

CASES = (*texts.CASES, *images.CASES, *others.CASES)
