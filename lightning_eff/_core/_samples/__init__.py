"""The way in of techniques that say which samples an epoch has, in which order and with which weights."""
