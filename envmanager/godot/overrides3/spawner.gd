func _shift(node: Node, by: Vector3) -> void:
	if node is Spatial and (node.get_parent() == null or node.get_parent() is Viewport):
		node.translation += by
	if not (node is Viewport and node.own_world):
		for child in node.get_children():
			_shift(child, by)


func _world(copy: Node, index: int) -> Node:
	var world = Viewport.new()
	world.own_world = true
	world.world_2d = World2D.new()
	world.add_child(copy)
	if index >= shown or not _has_window:
		world.render_target_update_mode = Viewport.UPDATE_DISABLED
		return world
	var frame = ViewportContainer.new()
	frame.stretch = true
	frame.rect_size = _tree.root.get_visible_rect().size / _grid()
	frame.rect_position = frame.rect_size * _cell(index)
	frame.add_child(world)
	return frame
