func heuristic() -> void:
	var to = -sign(body.position.x)
	if has_window():
		to = Input.get_action_strength("ui_right") - Input.get_action_strength("ui_left")
	act(PoolRealArray([to]), PoolIntArray())
