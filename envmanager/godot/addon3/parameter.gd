tool
class_name EnvManagerParameter, "res://addons/envmanager/icons/parameter.svg"
extends "res://addons/envmanager/lesson.gd"
# A number that the game reads by the arena's parameter(), with its values: one, a sampler, or one lesson after another.
#
# `value` is what the game reads when nobody trains it, and the constant without a sampler and lessons.

# One after another, instead of a sampler. The last one has no measure, and stays.
export(Array, Resource) var lessons = []
