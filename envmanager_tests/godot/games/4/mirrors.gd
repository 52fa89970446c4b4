extends "res://addons/envmanager/arena.gd"

var n_acts := 0


func reset(_rng: RandomNumberGenerator, _options: Dictionary) -> void:
	for agent in get_parent().get_children():
		if agent != self:
			agent.look(PackedFloat32Array(range(agent.continuous_size + agent.discrete_choices.size())))


func heuristics() -> Array:
	var counts := []
	for agent in get_parent().get_children():
		if agent != self:
			counts.append(agent.by_heuristic)
	return counts
