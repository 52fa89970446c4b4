@tool
@icon("res://addons/envmanager/icons/parameter.svg")
class_name EnvManagerLesson
extends Resource
## Where the values of a parameter come from while it is in this lesson, and when the next lesson begins.

## What it is called in the output.
@export var name := ""
@export_group("Values")
## How each episode draws the value. Empty: it is always `value`.
@export_enum("uniform", "log_uniform", "normal", "choice", "multi_range_uniform") var sampler := ""
## The value without a sampler.
@export var value := 0.0
## The least value (uniform, log_uniform).
@export var minimum := 0.0
## The greatest value (uniform, log_uniform).
@export var maximum := 1.0
## The mean (normal).
@export var mean := 0.0
## The standard deviation (normal).
@export var std := 1.0
## The values to choose from (choice), or pairs of a least and a greatest one: [0, 1, 5, 7] (multi_range_uniform).
@export var values := []
@export_group("Until")
## What ends the lesson: reward (the mean return), progress (the share of all steps), or a number of info() by its name.
@export var measure := ""
## The lesson ends when the measure is at least this.
@export var threshold := 0.0
## How many episodes it lasts at least, of which the mean counts. 0: 100, or 1 for progress.
@export_range(0, 1000, 1, "or_greater") var episodes := 0
## The behavior whose agents count, if the game has several.
@export var behavior := ""
