func _physics_process(delta: float) -> void:
	var next = body.position + MOVES[move] * SPEED * delta
	body.position = Vector2(clamp(next.x, 0, WIDTH), clamp(next.y, 0, WIDTH))
