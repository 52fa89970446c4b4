@tool
extends RefCounted
## What the editor says about agents and arenas: what is missing in their scene, and which fields they use.

const AGENT := "res://addons/envmanager/agent.gd"
const ARENA := "res://addons/envmanager/arena.gd"
const Policy := preload("res://addons/envmanager/policy.gd")
const SIZES := ["behavior", "observation_size", "continuous_size", "discrete_choices", "settings", "policy"]


## Whether a node has this script, or one that extends it.
static func is_a(node: Node, path: String) -> bool:
	return _scripts_of(node).any(func(script: Script) -> bool: return script.resource_path == path)


## Whether the sizes of a node count: those of an arena do while its scene has no agents, and none that come later.
static func uses_sizes(node: Node) -> bool:
	return not is_a(node, ARENA) or not (_agents_below(_root_of(node)) or node.get("joins"))


## Sentences that say what is missing.
static func warnings_of(node: Node) -> PackedStringArray:
	var found := PackedStringArray()
	var n_arenas := _all_below(_root_of(node), ARENA).size()
	if n_arenas > 1:
		found.append("The scene has %d arenas. The trainer copies the whole scene: keep one arena in it." % n_arenas)
	elif n_arenas == 0 and _is_played(_root_of(node)):
		found.append("The scene has no arena, which begins and ends its episodes: add an EnvManagerArena.")
	if node.get_script().resource_path in [AGENT, ARENA]:
		found.append("This script does nothing by itself. Extend it: right-click the node, Extend Script.")
	elif uses_sizes(node):
		if not node.get("observation_size") and not _is_in_code(node, ["observation_size", "func observations"]):
			found.append("It observes nothing: set Observation Size to the numbers that observe() returns.")
		var has_actions: bool = node.get("continuous_size") or node.get("discrete_choices")
		if not has_actions and not _is_in_code(node, ["continuous_size", "discrete_choices"]):
			found.append("It has no actions: set Continuous Size, or Discrete Choices.")
		if node.get("policy"):
			found.append_array(_warnings_of_policy(node, node.get("policy")))
	for other in _all_below(_root_of(node), AGENT):
		var is_alike = other.get("behavior") == node.get("behavior") and uses_sizes(other) and uses_sizes(node)
		if is_alike and node.get("settings") != null and not other.get("settings") in [null, node.get("settings")]:
			found.append("%s has the same behavior and other Settings: let both refer to the same." % other.name)
	var names := []
	for parameter in node.get("training").parameters if node.get("training") != null else []:
		var name = "" if parameter == null else parameter.name
		if name in names or name == "":
			found.append("Each of the Parameters of its Training needs a name of its own.")
		names.append(name)
	return found


# Sizes that a script sets in code are not known here; the game itself checks these.
static func _warnings_of_policy(node: Node, path: String) -> PackedStringArray:
	var policy := Policy.new(path)
	var wrong: String = policy.problem
	if wrong == "" and not _is_in_code(node, ["func observations", "observation_size", "continuous_size", "discrete_choices"]):
		wrong = policy.misfit([node.get("observation_size")], node.get("continuous_size"), Array(node.get("discrete_choices")))
	return PackedStringArray(["The policy %s %s." % [path, wrong]] if wrong != "" else [])


# The scripts of a node: its own, and those that it extends.
static func _scripts_of(node: Node) -> Array:
	var scripts := []
	var script: Script = node.get_script()
	while script != null:
		scripts.append(script)
		script = script.get_base_script()
	return scripts


static func _root_of(node: Node) -> Node:
	return node if node.owner == null else node.owner


static func _all_below(node: Node, path: String) -> Array:
	var found := [node] if is_a(node, path) else []
	for child in node.get_children():
		found += _all_below(child, path)
	return found


static func _agents_below(node: Node) -> Array:
	return _all_below(node, AGENT).filter(func(each: Node) -> bool: return not is_a(each, ARENA))


# Whether the game is this scene. An agent may have a scene of its own, which needs no arena.
static func _is_played(root: Node) -> bool:
	var main: String = ProjectSettings.get_setting("application/run/main_scene", "")
	var path := root.scene_file_path
	return path in ["", main] or main in ["", ResourceUID.id_to_text(ResourceLoader.get_resource_uid(path))]


# Whether a script of the user has one of these words, and may set these fields.
static func _is_in_code(node: Node, words: Array) -> bool:
	for script: Script in _scripts_of(node):
		if not script.resource_path in [AGENT, ARENA]:
			for word: String in words:
				if word in script.source_code:
					return true
	return false
