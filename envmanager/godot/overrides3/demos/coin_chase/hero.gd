func heuristic() -> void:
	var to = (coin.position - body.position).normalized()
	if has_window():
		to.x = Input.get_action_strength("ui_right") - Input.get_action_strength("ui_left")
		to.y = Input.get_action_strength("ui_down") - Input.get_action_strength("ui_up")
	act(PoolRealArray([to.x, to.y]), PoolIntArray())


func _physics_process(delta: float) -> void:
	velocity += (wanted - velocity) * TURN
	var next = body.position + velocity * delta
	body.position = Vector2(clamp(next.x, 0, WIDTH), clamp(next.y, 0, WIDTH))
