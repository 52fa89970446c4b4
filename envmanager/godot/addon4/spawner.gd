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
	_is_isolated = config["isolate"]
	_columns = int(ceil(sqrt(count)))


## Puts copy number `index` into the tree.
func place(copy: Node, index: int) -> void:
	if _is_isolated:
		_tree.root.add_child(_world(copy, index))
		return
	if copy is Node2D:
		copy.position += Vector2(_cell(index)) * spacing
	elif copy is Node3D:
		copy.position += Vector3(_cell(index).x, 0, _cell(index).y) * spacing
	if index >= shown and "visible" in copy:
		copy.visible = false
	_tree.root.add_child(copy)
	if index == 0:
		_tree.current_scene = copy
		_fit_window(copy)


func _cell(index: int) -> Vector2i:
	@warning_ignore("integer_division")
	return Vector2i(index % _columns, index / _columns)


# The first copies of a 2D game fit into the window.
func _fit_window(copy: Node) -> void:
	var wide := mini(_columns, maxi(shown, 1))
	if _has_window and copy is Node2D and wide > 1:
		_tree.root.canvas_transform = Transform2D.IDENTITY.scaled(Vector2.ONE / wide)


func _world(copy: Node, index: int) -> Node:
	var world := SubViewport.new()
	world.own_world_3d = true
	world.add_child(copy)
	if index >= shown or not _has_window:
		world.render_target_update_mode = SubViewport.UPDATE_DISABLED
		return world
	var frame := SubViewportContainer.new()
	frame.stretch = true
	frame.size = Vector2(DisplayServer.window_get_size()) / _columns
	frame.position = frame.size * Vector2(_cell(index))
	frame.add_child(world)
	return frame
