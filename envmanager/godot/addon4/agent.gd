@tool
@icon("res://addons/envmanager/icons/agent.svg")
class_name EnvManagerAgent
extends Node
## An agent observes the game, acts in it and earns rewards. Extend this script: override observe() and act().
##
## Entering the tree joins the game, leave() leaves it. The bridge calls observe() after the last tick of an action, and
## act() or heuristic() before the first tick of the next. observe() only looks; it changes nothing.

const Behavior := preload("res://addons/envmanager/behavior.gd")

## Agents of one behavior share one policy. They all have the same sizes.
@export var behavior := "default"
## How this behavior learns. Agents of one behavior refer to the same settings, or only one of them does.
@export var settings: Behavior = null
@export_group("Observations")
## How many numbers observe() returns. Several arrays, or images: override observations().
@export_range(0, 1000, 1, "or_greater") var observation_size := 0
@export_group("Actions")
## How many numbers between -1 and 1 act() gets.
@export_range(0, 100, 1, "or_greater") var continuous_size := 0
## How many choices each discrete action has: [5] is one action of 0 to 4.
@export var discrete_choices: PackedInt32Array  # with the default `[]`, exported games lose it (Godot 4.6)
@export_group("Without a trainer")
## The file of a trained policy, by which it acts when no trainer decides: `envmanager export RUN --to godot`.
@export_file("*.policy") var policy := ""

## False: the agent is there, but gets no action now.
var wants_action := true
## The reward since the last observation.
var reward := 0.0
## The arena it plays in; its `rng` is the only one to draw from.
var arena: Node = null

# What the bridge keeps here.
var _bridge: Node = null
var _copy: RefCounted = null
var _group: RefCounted = null
var _k := -1
var _bits := 0  # 1 terminated, 2 truncated: how the episode ended with this action
var _final = null  # what was seen last before the end
var _info = null


## What observe() returns, in its order: name, shape, dtype (float32, int32, uint8), low, high (null: no bound).
func observations() -> Array:
	return [{"name": "obs", "shape": [observation_size], "dtype": "float32", "low": null, "high": null}]


## A PackedFloat32Array of observation_size numbers; with observations() of several, an Array of packed arrays.
func observe() -> Variant:
	return null


## Does what the policy decided. A policy may go beyond -1 and 1.
func act(_continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	pass


## Plays when no trainer decides and no policy is set, by keyboard or rule: calls act() itself.
func heuristic() -> void:
	pass


## What a trainer may want to know besides, as a Dictionary, or null.
func info() -> Variant:
	return null


## Begins this agent's next episode, after end().
func restart() -> void:
	pass


## Adds to the reward. After the end of the episode nothing counts.
func add_reward(amount: float) -> void:
	if _bits == 0 and _copy != null and _copy.ended_bits == 0:
		reward += amount


## This agent's episode is over, the arena's goes on: when the action is over comes restart().
func end(truncated := false) -> void:
	if _k >= 0 and _bits == 0 and _copy.ended_bits == 0:
		_bits = 2 if truncated else 1
		_copy.end_agent(self)


## The agent leaves the game for ever. Its node may be freed then.
func leave(truncated := false) -> void:
	if _k >= 0 and is_instance_valid(_bridge):
		_bridge.left(self, 2 if truncated else 1)


## Tells the trainer something at once, outside of the steps.
func note(about: String, values := {}) -> void:
	if _bridge != null:
		_bridge.note(about, values)


## What a SubViewport of this copy shows now, for observe(): rows of pixels from top to bottom, the uint8 of a shape
## [height, width, 3]; with Image.FORMAT_L8, in shades of grey, [height, width, 1]. It needs `engine: {window: true}`.
func picture(viewport: SubViewport, format := Image.FORMAT_RGB8) -> PackedByteArray:
	return _bridge.pictures.of(self, viewport, format)


## Whether somebody sees the game, and may have a keyboard.
func has_window() -> bool:
	return DisplayServer.get_name() != "headless"


# Not _enter_tree: in Godot 4, that of a script that extends this one would take its place.
func _notification(what: int) -> void:
	if what == NOTIFICATION_ENTER_TREE:
		_bridge = get_node_or_null("/root/EnvManager")
		if _bridge != null:
			_enter()
	elif what == NOTIFICATION_EXIT_TREE:
		leave()


# Asked in the editor, of a node with this script itself; of one that extends it only with @tool.
func _get_configuration_warnings() -> PackedStringArray:
	return load("res://addons/envmanager/checks.gd").warnings_of(self)


func _enter() -> void:
	_bridge.joined(self)
