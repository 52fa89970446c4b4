func _image_of(viewport: Viewport) -> Image:
	var image = viewport.get_texture().get_data()
	if not viewport.render_target_v_flip:
		image.flip_y()
	return image


func _prepare(agent: Node, viewport: Viewport) -> void:
	if _known.empty() and agent._bridge._config.get("shown", 1) == 0:
		VisualServer.render_loop_enabled = false
		VisualServer.viewport_set_active(agent.get_tree().root.get_viewport_rid(), false)
	_known[viewport.get_instance_id()] = true
	viewport.render_target_update_mode = Viewport.UPDATE_ALWAYS
	if "visible" in agent.arena.root:
		agent.arena.root.visible = true  # a copy beyond `shown` is hidden, from its own viewports too
