func heuristic() -> void:
	var push = (goal.position - ball.position) / WIDTH * 4 - ball.linear_velocity / FAST
	if has_window():
		push.x = Input.get_action_strength("ui_right") - Input.get_action_strength("ui_left")
		push.y = Input.get_action_strength("ui_down") - Input.get_action_strength("ui_up")
	act(PoolRealArray([push.x, push.y]), PoolIntArray())
