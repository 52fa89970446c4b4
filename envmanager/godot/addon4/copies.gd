extends RefCounted
## All copies of the game: how they come to be, and to which of them a node belongs.

const Copy := preload("res://addons/envmanager/copy.gd")
const Roster := preload("res://addons/envmanager/roster.gd")
const Spawner := preload("res://addons/envmanager/spawner.gd")
const BUSY_AFTER_US := 1000000

var all: Array = []
var ending: Array = []  # those in which something has ended with this action
var torn: Array = []  # those whose arena has left the tree: the game changes its scene
var is_swapped := false  # one of them has another root now
var _at := {}  # id of a root -> copy


func add(root: Node, shown: bool) -> void:
	var copy := Copy.new()
	copy.index = all.size()
	_stand(copy, root)
	copy.shown = shown
	copy.ending = ending
	all.append(copy)


func _stand(copy: Copy, root: Node) -> void:
	_at.erase(copy.root_id)
	copy.root = root
	copy.root_id = root.get_instance_id()
	_at[copy.root_id] = copy


## Puts as many copies of the scene into the tree as are wanted; `say_busy` is called now and then.
func spawn(scene: PackedScene, spawner: Spawner, say_busy: Callable) -> void:
	var told_us := Time.get_ticks_usec()
	for i in spawner.count:
		var root := scene.instantiate()
		add(root, i < spawner.shown)
		spawner.place(root, i)
		if all[0].arena != null:
			spawner.spacing = all[0].arena.spacing
		if Time.get_ticks_usec() - told_us > BUSY_AFTER_US:
			told_us = Time.get_ticks_usec()
			say_busy.call()


## The copy that a node is in, or null.
func of(node: Node) -> Copy:
	while node != null:
		if _at.has(node.get_instance_id()):
			return _at[node.get_instance_id()]
		node = node.get_parent()
	return null


## The copy whose scene has gone, and which gets the one that a node is in; null if none has.
func successor(node: Node) -> Copy:
	while node.get_parent() != node.get_tree().root:
		node = node.get_parent()
	for copy: Copy in torn:
		var old: Node = instance_from_id(copy.root_id)
		if copy.arena == null and (old == null or not old.is_inside_tree()):
			_stand(copy, node)
			is_swapped = true
			return copy
	return null


func is_whole() -> bool:
	for copy: Copy in all:
		if copy.arena == null:
			return false
	return true


## Has the nodes join that entered the tree before it was known as a copy, in the order of the tree.
func announce(node: Node) -> void:
	if _is_ours(node):
		node._enter()
	for child in node.get_children():
		announce(child)


## Tells the roster of the behaviors that come later, and how many agents there may be.
func declare_to(roster: Roster) -> void:
	for copy: Copy in all:
		if copy.arena == null:
			roster.fault("the scene %s has no arena: no node's script extends arena.gd" % copy.root.name, null)
			return
		for scene: PackedScene in copy.arena.joins:
			var guest := scene.instantiate()
			_declare(guest, roster)
			guest.free()
		for group in roster.groups:
			var here: Array = copy.agents.filter(func(agent: Node) -> bool: return agent._group == group)
			group.max_agents += maxi(int(copy.arena.max_agents.get(group.name, 0)), here.size())


func _declare(node: Node, roster: Roster) -> void:
	if _is_ours(node):
		roster.group_of(node)
	for child in node.get_children():
		_declare(child, roster)


func _is_ours(node: Node) -> bool:
	return "_bridge" in node and node.has_method("heuristic")
