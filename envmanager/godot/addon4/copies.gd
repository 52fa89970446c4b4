extends RefCounted
## All copies of the game: how they come to be, and to which of them a node belongs.

const Copy := preload("res://addons/envmanager/copy.gd")
const Roster := preload("res://addons/envmanager/roster.gd")
const Spawner := preload("res://addons/envmanager/spawner.gd")
const ONE_PLACE := "%s is at the same place in all copies: the scene's root, or a node between, has no position. Make it a Node2D or Node3D, or set `isolate: true`"
const BUSY_AFTER_US := 1000000

var all: Array[Copy] = []  # typed in Godot 4, where a cast of each copy in every tick is slow
var ending: Array[Copy] = []  # those in which something has ended with this action
var torn: Array[Copy] = []  # those whose arena has left the tree: the game changes its scene
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
	for copy in torn:
		var old: Node = instance_from_id(copy.root_id)
		if copy.arena == null and (old == null or not old.is_inside_tree()):
			_stand(copy, node)
			is_swapped = true
			return copy
	return null


## Keeps what the trainer wants to begin: a list of [arena, at once, seed, options].
func note_begins(begins: Array) -> void:
	for begin in begins:
		all[int(begin[0])].next = begin


## Begins the episodes that the trainer wants. Returns whether there were any.
func begin_tasks() -> bool:
	var has_begun := false
	for copy in all:
		if copy.next != null:
			copy.begin_next_task()
			has_begun = true
	return has_begun


## The copies (by index) that play, and those whose episode has just ended; {} for all.
func with_rows(just_ended: Array) -> Dictionary:
	var some := {-1: true}
	for copy in all:
		if not copy.rests or just_ended.has(copy):
			some[copy.index] = true
	return {} if some.size() > all.size() else some


func is_whole() -> bool:
	for copy in all:
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
	if all.size() > 1 and all[0].root.get_parent() == all[1].root.get_parent():
		var stuck: Node = _body_without_place(all[0].root, true)
		if stuck != null:
			roster.fault(ONE_PLACE % stuck.name, null)
	for copy in all:
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


# A body that would be at the same place in all copies, since a node above it has no position that it could hand down.
func _body_without_place(node: Node, may_move: bool) -> Node:
	may_move = may_move and (node is CanvasItem or node is Node3D)
	if not may_move and (node is CollisionObject2D or node is CollisionObject3D):
		return node
	if not node is Viewport:
		for child in node.get_children():
			var found := _body_without_place(child, may_move)
			if found != null:
				return found
	return null


func _declare(node: Node, roster: Roster) -> void:
	if _is_ours(node):
		roster.group_of(node)
	for child in node.get_children():
		_declare(child, roster)


func _is_ours(node: Node) -> bool:
	return "_bridge" in node and node.has_method("heuristic")
