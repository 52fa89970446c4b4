extends "res://addons/envmanager/arena.gd"
## Does wrong what the option "fail" names, in arena "in" or in all.

var fail := ""
var actions := 0


func reset(_from: RandomNumberGenerator, options: Dictionary) -> void:
	fail = options.get("fail", "") if options.get("in", index) == index else ""
	actions = 0
	if fail == "reset":
		_call_nobody()


func observe():  # observe() is here
	if actions == 0:
		return PackedFloat32Array([0, 0])
	match fail:
		"observe":
			var nobody = null
			nobody.call_me()  # in observe
		"size":
			return PackedFloat32Array([1, 2, 3])
		"nan":
			return PackedFloat32Array([NAN, index])
		"type":
			return "what I see"
		"array":
			return [1.0, 2.0]
	return PackedFloat32Array([actions, index])


func act(_continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	actions += 1
	if fail == "nan reward":
		add_reward(INF)
	elif fail == "act":
		_call_nobody()
	elif fail == "slow":
		OS.delay_msec(50)
	elif fail == "loop":
		while true:
			pass
	elif fail == "quit":
		get_tree().quit(3)
	elif fail == "close":
		get_tree().quit()
	elif fail == "stranger":
		var stranger: Node = load("res://rat.tscn").instantiate()
		add_child(stranger)


func heuristic() -> void:
	act(PackedFloat32Array(), PackedInt32Array([0]))


func after_tick() -> void:
	if fail == "after_tick":
		_call_nobody()


func _call_nobody() -> void:
	var nobody = null
	nobody.call_me()  # in _call_nobody
