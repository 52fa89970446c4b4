extends RefCounted
## Where the copies of the game stand: on a square grid, or each in a world of its own.

var count := 0
var shown := 0
var spacing := 0.0
var _is_isolated := false
var _columns := 1
var _tree: SceneTree = null
var _has_window := DisplayServer.get_name() != "headless"


func _init(tree: SceneTree, config: Dictionary) -> void:
	_tree = tree
	count = int(config["arenas"])
	shown = int(config["shown"])
	_is_isolated = config["isolate"] and count > 1  # one alone may change its scene, of which the tree knows
	_columns = int(ceil(sqrt(count)))


## Puts copy number `index` into the tree.
func place(copy: Node, index: int) -> void:
	if _is_isolated:
		_tree.root.add_child(_world(copy, index))
		return
	if copy is Node2D:
		copy.position += Vector2(_cell(index)) * spacing
	elif copy is Node3D:
		_shift(copy, Vector3(_cell(index).x, 0, _cell(index).y) * spacing)
	if index >= shown and "visible" in copy:
		copy.visible = false
	_tree.root.add_child(copy)
	if index == 0:
		_tree.current_scene = copy
	elif index == 1:  # now it is known how far apart they are
		_fit_window(copy)


# In 3D a viewport ends the chain of transforms but not the world: cameras in it have to be moved themselves.
func _shift(node: Node, by: Vector3) -> void:
	if node is Node3D and (node.get_parent() == null or node.get_parent() is SubViewport):
		node.position += by
	if not (node is SubViewport and node.own_world_3d):
		for child in node.get_children():
			_shift(child, by)


func _cell(index: int) -> Vector2i:
	@warning_ignore("integer_division")
	return Vector2i(index % _columns, index / _columns)


# How many of the visible copies stand side by side, and how many below each other.
func _grid() -> Vector2:
	var wide := mini(_columns, maxi(shown, 1))
	return Vector2(wide, ceilf(float(mini(shown, count)) / _columns))


# The visible copies of a 2D game fit into the window; one alone fills it.
func _fit_window(copy: Node) -> void:
	if _has_window and copy is Node2D and shown > 1:
		var window := _tree.root
		var size := window.get_visible_rect().size
		var all := size + (_grid() - Vector2.ONE) * spacing
		var scale := minf(size.x / all.x, size.y / all.y)
		window.canvas_transform = Transform2D(Vector2(scale, 0), Vector2(0, scale), (size - all * scale) / 2)


func _world(copy: Node, index: int) -> Node:
	var world := SubViewport.new()
	world.own_world_3d = true
	world.add_child(copy)
	if index >= shown or not _has_window:
		world.render_target_update_mode = SubViewport.UPDATE_DISABLED
		return world
	var frame := SubViewportContainer.new()
	frame.stretch = true
	frame.size = _tree.root.get_visible_rect().size / _grid()
	frame.position = frame.size * Vector2(_cell(index))
	frame.add_child(world)
	return frame
