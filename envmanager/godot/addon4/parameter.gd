@tool
@icon("res://addons/envmanager/icons/parameter.svg")
class_name EnvManagerParameter
extends "res://addons/envmanager/lesson.gd"
## A number that the game reads by the arena's parameter(), with its values: one, a sampler, or one lesson after another.
##
## `value` is what the game reads when nobody trains it, and the constant without a sampler and lessons.

const Lesson := preload("res://addons/envmanager/lesson.gd")

@export_group("Lessons")
## One after another, instead of a sampler. The last one has no measure, and stays.
@export var lessons: Array[Lesson] = []


# A parameter itself never ends.
func _validate_property(property: Dictionary) -> void:
	if property.name in ["measure", "threshold", "episodes", "behavior", "Until"]:
		property.usage = PROPERTY_USAGE_NONE
